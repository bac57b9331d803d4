"""What shells and scripts are told of the commands: what completes a line."""
