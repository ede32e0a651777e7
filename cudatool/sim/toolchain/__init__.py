"""Stand-ins for NVIDIA's libraries beside the driver, and the images that modules are loaded from."""
