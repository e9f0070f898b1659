module @barrier attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<ui32>) -> (tensor<ui32>) {
    %0 = "stablehlo.all_reduce"(%arg0) ({
    ^bb0(%a: tensor<ui32>, %b: tensor<ui32>):
      %c = stablehlo.add %a, %b : tensor<ui32>
      stablehlo.return %c : tensor<ui32>
    }) {replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<ui32>) -> tensor<ui32>
    return %0 : tensor<ui32>
  }
}
