"""The MDP: what the agent sees and does, and how it is rolled out."""
