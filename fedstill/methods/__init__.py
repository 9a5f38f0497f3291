"""Methods, one file each: its config, what its nodes answer and what its server does."""
