"""Say what an experiment is, how it is configured, and how a classifier is trained."""
