"""The planner: predicts AFD's speed-up from a model, a machine and, if there is one, a measured step.

Pure Python. Nothing in here imports torch, and of SGLang only `errors` and the connector registry,
so that it answers on a laptop. Docs: docs/planner.md.
"""
