"""What shells and scripts are told of the commands: completion."""
