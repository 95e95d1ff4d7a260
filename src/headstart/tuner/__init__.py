"""What a trace says of memory, block size and policy, before anything is bought or restarted."""
