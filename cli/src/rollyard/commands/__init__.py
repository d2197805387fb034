"""The commands of `rollyard`. A module is imported only when one of its commands is called."""
