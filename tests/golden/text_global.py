# global graph, 17 nodes
%x = argument()  # f32[2, 8] [S(0), R] @ model.py:1
%w = argument()  # f32[8, 8] [R, S(0)] @ model.py:2
%linear_default = aten.linear.default(%x, %w)  # f32[2, 8] [S(0), S(1)] @ model.py:3
%linear_default_1 = aten.linear.default(%x, %w)  # f32[2, 8] [S(0), S(1)] @ model.py:4
%view_default = aten.view.default(%linear_default, [2, 8])  # f32[2, 8] [S(0), S(1)] @ model.py:5
%to_dtype = aten.to.dtype(%view_default, torch.bfloat16)  # bf16[2, 8] [S(0), S(1)] @ model.py:6
%mul_tensor = aten.mul.Tensor(%linear_default_1, -0.0)  # f32[2, 8] [S(0), S(1,1x_x4)] @ model.py:7
%redistribute = redistribute(%mul_tensor, [S(0), S(1,1x_x4)], [S(0), R])  # f32[2, 8] [S(0), R] @ model.py:8
%redistribute_1 = redistribute(%redistribute, [S(0), R], [S(0), R])  # f32[2, 8] [S(0), R] @ model.py:9
%redistribute_2 = redistribute(%redistribute_1, [S(0), R], [R, R])  # f32[2, 8] [R, R] @ model.py:10
%permute_default = aten.permute.default(%redistribute_2, [1, 0])  # f32[8, 2]{1, 8} [R, R] @ model.py:11
%topk_default = aten.topk.default(%permute_default, 1, dim=0)  # (f32[1, 2], i64[1, 2]) ([R, R], [R, R]) @ model.py:12
%sum_dim_int_list = aten.sum.dim_IntList(%x, [0], True)  # f32[1, 8] [P, R] @ model.py:13
%amax_default = aten.amax.default(%x, [0])  # f32[8] [P(max), R] @ model.py:14
%neg_default = aten.neg.default(%linear_default)  # f32[2, 8] [S(0), S(1)] @ model.py:15
%getitem = getitem(%topk_default, 0)  # f32[1, 2] [R, R] @ model.py:16
return (%to_dtype, %getitem, %sum_dim_int_list, %amax_default, None)
