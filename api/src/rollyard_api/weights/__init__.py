"""Weight updates: what trainers asked for, and how every backend is brought to the new weights."""
