"""Values: meshes, layouts, arrays, trees of them, and the dtypes of a computation."""
