"""Field types and parts of specs that the resources share."""
