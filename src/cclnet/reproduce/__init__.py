"""The paper's tables and figures as experiments that anyone can run again."""
