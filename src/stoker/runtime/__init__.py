"""What the rest of the package asks of the operating system, each thing in one way."""
