"""Jobs before and while they run: manifests and tasks are read, submitted and watched."""
