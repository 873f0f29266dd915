"""What a module, its loss and its data must fulfil to be trained exactly, checked beforehand."""
