"""The embedded benchmark, its tiny model, the scripted agent that it imitates, and the quick start."""
