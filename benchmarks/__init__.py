"""What can be measured about this project: each module has ``run()``, which returns numbers by name and unit."""
