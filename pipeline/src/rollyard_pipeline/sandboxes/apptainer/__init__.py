"""Apptainer sandboxes: the program, its instances, and the images that they start from."""
