"""Images with their labels, decoded in the readers: `ImageSource`.

source.py     ImageSource: the public face of everything below
decode.py     bytes to pixels with Pillow (the only module here that imports it), by declared rules
rules.py      those rules
geometry.py   where a resize takes boxes, points and cameras
files.py      which images there are, and which of them a split takes
labels.py     objects of an image as padded arrays with masks, or as ragged ones
plain.py      images alone, and a folder for each class
voc.py        Pascal VOC: an XML file for each image
coco.py       COCO: one JSON file for all images
dexycb.py     DexYCB: hands and objects, with cameras and depth
"""
