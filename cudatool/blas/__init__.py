"""Matrix products: cuBLAS on a GPU, NumPy on the software device."""
