"""The attention role: experts that live elsewhere, the dispatcher that reaches them, the step."""
