module @broadcast attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<ui32>, %arg1: tensor<1x8x128xui32>) -> (tensor<1x8x128xui32>) {
    %0 = stablehlo.replica_id : tensor<ui32>
    %1 = stablehlo.constant dense<[0, 1, 1, 0]> : tensor<4xui32>
    %2 = stablehlo.dynamic_slice %1, %0, sizes = [1] : (tensor<4xui32>, tensor<ui32>) -> tensor<1xui32>
    %3 = stablehlo.reshape %2 : (tensor<1xui32>) -> tensor<ui32>
    %4 = stablehlo.compare EQ, %3, %arg0, UNSIGNED : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
    %5 = stablehlo.constant dense<0> : tensor<1x8x128xui32>
    %6 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<i1>) -> tensor<1x8x128xi1>
    %7 = stablehlo.select %6, %arg1, %5 : tensor<1x8x128xi1>, tensor<1x8x128xui32>
    %8 = "stablehlo.all_reduce"(%7) ({
    ^bb0(%a: tensor<ui32>, %b: tensor<ui32>):
      %c = stablehlo.add %a, %b : tensor<ui32>
      stablehlo.return %c : tensor<ui32>
    }) {replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>} : (tensor<1x8x128xui32>) -> tensor<1x8x128xui32>
    return %8 : tensor<1x8x128xui32>
  }
}
