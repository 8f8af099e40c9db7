"""The tables and figures of the paper as experiments that anyone can run again."""
