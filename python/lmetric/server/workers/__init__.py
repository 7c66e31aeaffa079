"""Worker processes of one server: a supervisor owns the port, and the workers share their load."""
