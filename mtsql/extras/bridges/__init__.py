"""The same questions, environment and rewards under other engines: TRL, verl, SkyRL.

The core knows nothing of them. Each bridge is one short file over `mtsql.extras.bridges.task`;
docs/served.md says when to take which, and what was run.
"""
