"""What a run would take on machines that are not here: arithmetic, and queues where several wait."""
