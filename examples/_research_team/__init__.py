"""What the example needs besides its graph: roles, options, display, measurements, figure."""
