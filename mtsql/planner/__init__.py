"""Will it fit? The GPU memory of a run, from shapes alone."""
