"""Who may make which call, and how much of the control plane one namespace may hold."""
