import torch

# The tests' tensors are small: a second thread costs more than it gives, and a busy machine makes
# it cost far more.
torch.set_num_threads(1)
