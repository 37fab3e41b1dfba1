"""The embedded benchmark, its tiny model, and the scripted agent that it imitates."""
