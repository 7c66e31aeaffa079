"""The commands of the laboratory. `lmetric.cli.app` lists them."""
