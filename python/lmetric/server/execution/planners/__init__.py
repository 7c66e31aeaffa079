"""What a request's next step is, for each way of carrying it out. No planner does I/O."""
