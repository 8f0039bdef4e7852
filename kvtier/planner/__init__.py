"""`kvtier plan`: what a model, a context and a number of users ask of a config, worked out without weights or a GPU."""
