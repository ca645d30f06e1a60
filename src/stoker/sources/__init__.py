"""Raw samples, by number: simulations, images, trajectories, archives, tables, any map-style torch `Dataset`.

protocol.py        what a source promises, and how it names itself for the recipe
hdf5.py            HDF5Source: the public face of everything below
  files.py           which files, in which order, and what their names say
  splits.py          train, val and test: by file, or by fractions over stable keys
  hdf5_scan.py       describe all files once: layouts, schema, selected rows
  pdebench.py        the layouts of PDEBench, by the names of datasets
  well.py            the layout of The Well, by its attributes
  declared.py        layouts that the user declares
  hdf5_layout.py     axes, and how stored arrays become (T, H, W, C)
  hdf5_blocks.py     read so that each chunk is decompressed once
  hdf5_open.py       few open files, per process, clear errors
images/            ImageSource: images with labels, decoded by the readers
torch_dataset.py   TorchSource: any map-style Dataset (the only module here that may import torch)
  torch_items.py     items as flat dictionaries of arrays
  torch_identity.py  what names a Dataset: what it holds, and its code
  torch_arrays.py    digest of arrays and tensors held in memory
arrays.py          ArraySource: trajectories of varying length in HDF5 and Zarr, Zarr grids, `.npy`
  array_layout.py    rows, one group per sample, or flat arrays with offsets
  containers.py      files that hold named arrays, opened lazily
tar.py             TarSource: WebDataset archives, members listed once and read by position
parquet.py         ParquetSource; hf_datasets.py: DatasetsSource; arrow.py: their columns as fields
sql/               SQLSource: rows of SQLite and PostgreSQL; tables by key, for joined columns
subset.py          the first samples of a source; split_of.py: one split of any source
"""
