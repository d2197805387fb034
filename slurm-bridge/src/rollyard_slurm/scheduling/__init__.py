"""Pure decisions about time and place: time limits and successors, the poll interval, nodes to avoid."""
