"""What AFD knows about checkpoints and model families."""
