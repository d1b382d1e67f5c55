# local graph, 13 nodes
%x = argument()  # f32[3, 8] @ model.py:1
%local_size = local_size(5, ((1, 1, 0),))  # 3 @ model.py:2
%local_begin = local_begin(5, ((1, 1, 0),))  # 0 @ model.py:3
%integer = integer('add', %local_size, %local_begin)  # 3 @ model.py:4
%all_gather_into_tensor_default = _c10d_functional.all_gather_into_tensor.default(%x, 2, 'dp')  # f32[6, 8] @ model.py:5
%wait_tensor_default = _c10d_functional.wait_tensor.default(%all_gather_into_tensor_default)  # f32[6, 8] @ model.py:6
%slice_tensor = aten.slice.Tensor(%wait_tensor_default, 0, %local_begin, %integer)  # f32[3, 8] @ model.py:7
%all_reduce_default = _c10d_functional.all_reduce.default(%slice_tensor, 'sum', 'tp')  # f32[3, 8] @ model.py:8
%wait_tensor_default_1 = _c10d_functional.wait_tensor.default(%all_reduce_default)  # f32[3, 8] @ model.py:9
%keep_first = keep_first(%slice_tensor, 1)  # f32[3, 8] @ model.py:10
%all_to_all_single_default = _c10d_functional.all_to_all_single.default(%x, [1, 2], [2, 1], 'tp')  # f32[3, 8] @ model.py:11
%wait_tensor_default_2 = _c10d_functional.wait_tensor.default(%all_to_all_single_default)  # f32[3, 8] @ model.py:12
return (%keep_first, %wait_tensor_default_2)
