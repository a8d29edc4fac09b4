"""Values: meshes, layouts, arrays, trees of them, and in which dtypes they are computed with."""
