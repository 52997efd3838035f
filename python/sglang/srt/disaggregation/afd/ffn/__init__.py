"""The FFN role: a process without requests that receives rows, runs experts and returns rows."""
