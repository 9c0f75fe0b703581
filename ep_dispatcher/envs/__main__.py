"""Prints the table of all switches. In a file of its own, as the package has imported envs before this runs."""

from ep_dispatcher.envs import table

if __name__ == "__main__":
    print(table())
