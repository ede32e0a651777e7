"""Arrays to and from files without a copy in host memory: GPUDirect Storage, through NVIDIA's cuFile.

Where the file system or the machine cannot do that, cuFile itself copies by way of the host.
"""

from cudatool.gds._file import GdsFile, gds_deregister_buffer, gds_register_buffer

__all__ = ["GdsFile", "gds_deregister_buffer", "gds_register_buffer"]
