"""Attention-FFN disaggregation: attention ranks and FFN ranks serve one model. See README.md."""
