"""RolloutJob and BackendPool as pydantic models, and the CRD YAML generated from them."""
