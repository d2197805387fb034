"""Functions that build the calls of the REST API and say how their answers are read, without I/O."""
