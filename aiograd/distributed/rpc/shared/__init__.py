"""Large frames between processes of one machine travel in shared memory, and only a short record of them over the connection."""
