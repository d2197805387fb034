"""The commands of `rollyard`, with one module for each. A module is imported only when it is called."""
