# scheduled graph, 5 nodes
%x = argument()  # f32[2, 4] argument @ model.py:1
%relu_default = aten.relu.default(%x)  # f32[2, 4] compute pool @ model.py:2
%all_reduce_default = _c10d_functional.all_reduce.default(%relu_default, 'sum', 'tp')  # f32[2, 4] comm:tp pool after(%relu_default) @ model.py:3
%wait_tensor_default = _c10d_functional.wait_tensor.default(%all_reduce_default)  # f32[2, 4] compute output after(%all_reduce_default) @ model.py:4
return (%wait_tensor_default,)
