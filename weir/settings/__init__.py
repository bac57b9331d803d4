"""The settings: YAML files and variables as typed sections, and the reference page that is made from them."""
