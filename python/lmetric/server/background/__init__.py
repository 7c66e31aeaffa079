"""Background tasks: checks of health and load, exchange with other routers."""
