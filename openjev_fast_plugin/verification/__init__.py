"""`openjev-fast verify`: a backend held against the original on the user's own model and requests.

Four levels, each of which can fail by itself; the first that does says where to look:

preparation: the prompts' ids, the tree they form, the weights as they were taken over.
ops: every op against its reference, on the inputs a forward gave it.
states: hidden states after every layer, against the original's and a float32 forward of the same weights.
answers: probabilities and decisions, request by request.
"""
