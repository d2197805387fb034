"""Jobs before and while they run: their manifests and tasks are read, submitted and watched."""
