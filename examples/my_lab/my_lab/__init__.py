"""What a lab adds to fedstill."""
