"""What runs beside requests: checks of health and load, other replicas."""
